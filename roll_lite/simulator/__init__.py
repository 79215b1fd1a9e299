"""A run before it is run: the production schedulers on a virtual clock, with modelled engines and a modelled trainer."""
