"""Which rank is where, who forms a group with whom, and what each rank holds; for any order of the dimensions."""
