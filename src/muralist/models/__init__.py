"""Networks, their weights, and the model spec by which the trainer knows them."""
