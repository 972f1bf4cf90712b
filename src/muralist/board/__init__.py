"""The board: a page on this machine that shows runs, generation folders and evaluations, and changes none of them."""
