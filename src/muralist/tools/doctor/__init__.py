"""What the doctor looks at: one file per kind of trouble, one list in `every.py`."""
