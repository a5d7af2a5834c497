"""`mmrl audit`: what each call was truly worth, and how far each algorithm's credit and gradient are from it."""
