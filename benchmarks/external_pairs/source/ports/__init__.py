"""Ports of other projects beside the torch classes of `transformers`: how each is built, not its code.

Each builder gets the folder that contains the project's package, so that a copy with a mistake can be built too.
"""

from benchmarks.external_pairs.source.ports.bonsai import BONSAI
from benchmarks.external_pairs.source.ports.port import Port

PORTS: dict[str, Port] = {**BONSAI}
