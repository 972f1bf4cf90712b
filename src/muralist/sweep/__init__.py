"""Which weights and which guidance of a JiT make the best pictures."""
