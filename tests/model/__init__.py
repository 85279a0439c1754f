"""A model of the contract, and random clusters that are compared with it."""
