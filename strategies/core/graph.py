"""Communication graphs: who meets whom in a round of a decentralised method, and how much each of them counts.

A graph is over the names of all known clients, those that are away included, and depends on these names, the keys and
the seed alone. When a client joins, a graph is drawn over the longer list.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from common.config import between, choice
from common.seeds import numpy_generator

# By name, the neighbours of a client in the order of the names that the graph was drawn over.
Graph = Mapping[str, tuple[str, ...]]
Edge = tuple[int, int]

# So many times each edge of a random graph is chosen to be exchanged, on average.
_EXCHANGES = 20


@dataclass(frozen=True, kw_only=True)
class GraphParameters:
    """Keys of every method whose clients meet on a graph.

    ``graph``: ``"ring"`` in the order of names, ``"full"``, or ``"random"``, in which each client has ``degree``
    neighbours, or all others if there are no more. ``redraw``: a random graph is drawn anew in each round.
    """

    graph: str = choice("ring", "random", "full")
    degree: int = between(1)
    redraw: bool


def draw_graph(names: Sequence[str], parameters: GraphParameters, seed: int, server_round: int) -> Graph:
    """Return the graph of a round over ``names``, without loops and the same from both ends.

    A random one is connected if ``degree`` is 2 or more. Where no graph is regular, because ``degree`` and the number
    of clients are odd, one client has one neighbour less.
    """
    most = len(names) - 1
    degree = min({"ring": 2, "random": parameters.degree, "full": most}[parameters.graph], most)
    edges = _circulant(len(names), degree)
    if parameters.graph == "random" and degree < most:
        when = [server_round] if parameters.redraw else []
        edges = _exchanged(edges, len(names), degree, numpy_generator(seed, "graph", *when))
    found: list[list[int]] = [[] for _ in names]
    for a, b in edges:
        found[a].append(b)
        found[b].append(a)
    return {name: tuple(names[i] for i in sorted(ends)) for name, ends in zip(names, found, strict=True)}


def metropolis_weights(graph: Graph, name: str) -> dict[str, float]:
    """Return the weight of each neighbour of ``name``, ``1 / (1 + max(deg_i, deg_j))``; the rest is its own.

    The matrix of these weights is symmetric and doubly stochastic, on every graph; on a regular one all are equal.
    """
    own = len(graph[name])
    return {peer: 1 / (1 + max(own, len(graph[peer]))) for peer in graph[name]}


def _circulant(n: int, degree: int) -> list[Edge]:
    """Return the edges from each of ``n`` places to those up to ``degree // 2`` steps on, and if ``degree`` is odd to
    the one across: with an odd ``n`` the last place has none there.
    """
    edges = [(i, (i + step) % n) for step in range(1, degree // 2 + 1) for i in range(n)]
    return edges + [(i, i + n // 2) for i in range(n // 2) if degree % 2]


def _exchanged(edges: list[Edge], n: int, degree: int, generator: np.random.Generator) -> list[Edge]:
    """Return a random graph in which each place has as many edges as in ``edges``, but for the order of places.

    Two edges a-b and c-d become a-d and c-b, unless that makes a loop or an edge that there is: a Markov chain over the
    graphs of these degrees that is symmetric and reaches them all. It goes on until the graph is connected.
    """
    order = generator.permutation(n).tolist()
    edges = [(order[a], order[b]) for a, b in edges]
    there = {frozenset(edge) for edge in edges}
    while True:
        count = _EXCHANGES * len(edges) // 2
        picks = generator.integers(len(edges), size=(count, 2)).tolist()
        turns = generator.integers(2, size=count).tolist()
        for (i, j), turn in zip(picks, turns, strict=True):
            (a, b), (c, d) = edges[i], edges[j] if turn else edges[j][::-1]
            new = {frozenset((a, d)), frozenset((c, b))}
            if len({a, b, c, d}) == 4 and not new & there:
                there -= {frozenset((a, b)), frozenset((c, d))}
                there |= new
                edges[i], edges[j] = (a, d), (c, b)
        if degree < 2 or _connected(edges, n):
            return edges


def _connected(edges: list[Edge], n: int) -> bool:
    leads = list(range(n))

    def root(place: int) -> int:
        while leads[place] != place:
            leads[place] = place = leads[leads[place]]
        return place

    for a, b in edges:
        leads[root(a)] = root(b)
    return len({root(place) for place in range(n)}) == 1
