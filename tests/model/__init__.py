"""A model of the contract, random clusters that are compared with it, and mutants it must catch."""
