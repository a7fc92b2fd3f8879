"""Flower's SuperNode as ``floret node`` starts it: this module's name is what the list of processes shows."""

from client_app.node.transport import run_supernode

if __name__ == "__main__":
    run_supernode()
