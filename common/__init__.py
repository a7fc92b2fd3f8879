"""What both halves of a method and the command line need: the run config, names on the wire, seeds."""
