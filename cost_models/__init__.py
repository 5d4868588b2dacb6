"""Formulas: how long an operator or a collective takes, how many bytes a device holds."""
