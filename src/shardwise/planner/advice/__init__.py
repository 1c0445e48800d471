"""What a plan or an analysis tells its reader: why, why not, what if, what is missing, who else can run it."""
