"""A plugin for Noiser. Installing it is all: nothing has to be imported."""
