"""The embedded data set, the small HunyuanDiT and the demo command, so that a first run needs no download."""
