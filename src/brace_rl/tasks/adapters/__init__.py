"""Tasks that run environments of other packages; each imports its package when it is used."""
