"""One trace for each kind of input, kept and looked up again, under whatever transform a call runs."""
