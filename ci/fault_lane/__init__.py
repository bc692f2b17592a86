"""What can go wrong with a trainer, with a machine, and with what a run wrote: injected for real."""
