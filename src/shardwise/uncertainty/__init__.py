"""How far predictions of published runs were off, and what that says of a new job: the error bars."""
