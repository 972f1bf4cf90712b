"""`muralist estimate`: time, cost, energy and scaling from a measured speed."""
