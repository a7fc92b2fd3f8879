"""The local engine: a federation on this machine, in worker processes in the place of SuperLink, app bundle and Ray.

A process that has imported everything and read the data (``supervisor``) forks one for the ServerApp (``grid``) and as
many for the ClientApp as there are CPUs or GPUs (``worker``). The data are in memory once; what clients keep is with
the server, travels with each message, and is written when the server writes a checkpoint.
"""
