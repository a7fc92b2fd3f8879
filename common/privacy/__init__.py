"""Differential privacy that both halves use: what is spent, what noise is, and the ledger of a client."""
