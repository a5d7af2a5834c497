"""The audit of credit: how far each algorithm's credit is from the truth, by playing a program on from its calls."""
