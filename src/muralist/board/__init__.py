"""The board: a local web page that shows runs, generation folders and evaluations, and changes none of them."""
