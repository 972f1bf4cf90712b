"""Networks, their weights, and what the training loop needs to know of each family."""
