"""Programs that show a failure without Plumbline: what they contain, how they are rendered and run."""
