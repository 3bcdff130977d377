"""The codes of errors and notices: what each means, and its text in other languages."""
