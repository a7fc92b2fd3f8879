"""The client half: from a message to a client's round, and what a client keeps between rounds."""
