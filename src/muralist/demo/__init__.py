"""What ships so that a first run has something to do: driving scenes, a small HunyuanDiT, the demo command."""
