"""Training objectives and samplers: small pure functions without state."""
