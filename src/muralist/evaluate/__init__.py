"""How good pictures are: features of every image, numbers that compare two sets, and a page to look at."""
