"""Studies: arms that differ in settings, trained over seeds, and a verdict with an interval."""
