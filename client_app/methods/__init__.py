"""The client half of each method; ``strategies/`` holds the server half under the same file name."""
