"""How long, how much, how well it scales: from measurements."""
