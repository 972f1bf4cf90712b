"""How good pictures are: features of every image, and numbers that compare two sets of them."""
