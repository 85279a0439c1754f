"""Parts of the package are replaced, one at a time, to see that tests and the model miss them."""
