"""The driver of a pool on Ray: it lets Ray start a server on each node, and ends when all servers have ended.

It is run by its path, as a command like srun for SLURM. However it ends, Ray frees its resources. The Python of Ray's
nodes need not have Plumbline, because the driver sends them the class ``NodeServer``. Ray is imported late, because it
reads its environment variables on import.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Any

END_TIMEOUT_S = 2.0
"""Time for the other servers to end their ranks when one has ended badly."""

_MOST_NODES = 8
"""The largest number of a cluster's nodes that a message names. It only counts the others."""


class NodeServer:
    """An actor that holds a node's resources and runs its server."""

    def run(self, command: Sequence[str], folder: str, environment: Mapping[str, str], told: str) -> str:
        """Run the server until it ends. It reads ``told`` from standard input. Return what went wrong, or ""."""
        with tempfile.TemporaryFile() as output:
            try:
                server = subprocess.Popen(
                    [*command],
                    cwd=folder,
                    env={**os.environ, **environment},
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            except OSError as error:
                return f"{error}: the environment and {folder} must be on a file system that every node mounts"
            assert server.stdin is not None
            with suppress(BrokenPipeError), server.stdin:  # its end is reported below
                server.stdin.write(told.encode())
            # When this process ends, even if it is killed, the pipe closes: the watcher then terminates the server,
            # which ends its ranks.
            end = ["sh", "-c", 'read end; kill "$0"', str(server.pid)]
            with subprocess.Popen(end, stdin=subprocess.PIPE) as watcher:
                code = server.wait()
                watcher.kill()
            if code == 0:
                return ""
            output.seek(max(0, output.seek(0, os.SEEK_END) - 2000))
            printed = output.read().decode(errors="replace").strip()
            return f"its server ended with exit code {code}: {printed}"


def main() -> None:
    """Place the servers, start them, and wait until they end. Exit with a message if something fails."""
    options = _options()
    secret = sys.stdin.readline()  # the servers get it as an argument of a call
    _connect(options)
    import ray
    from ray.util.placement_group import placement_group

    if options.groups and not options.temp_dir and (reason := too_small(ray.nodes(), options)):
        sys.exit(reason)
    # A bundle never spans nodes. A cluster started here has one node, which stands for all.
    strategy = "SPREAD" if options.temp_dir else "STRICT_SPREAD"
    group = placement_group([options.resources] * options.nodes, strategy=strategy)
    if not group.wait(options.timeout):
        sys.exit(
            f"Ray has not placed {_wanted(options)} in {options.timeout:.0f} s: {_present(ray.nodes())}; free: "
            f"{_shown(ray.available_resources())}"
        )
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        # Ray would print the logs of every raylet that ends.
        code = _serve(group, options, secret)
        ray.shutdown()
    sys.exit(code)


def _connect(options: argparse.Namespace) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    given: dict[str, Any] = {"address": options.address}
    if options.temp_dir:
        # Ray listens on all interfaces. A secret keeps others from running code there.
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        # Ranks get the same priority as with other launchers. Ray's workers have a niceness of 15 by default.
        os.environ.setdefault("RAY_worker_niceness", "0")
        resources = {name: count * options.nodes for name, count in options.resources.items()}
        given = {"address": "local", "_temp_dir": options.temp_dir, "include_dashboard": False}
        given |= {"num_cpus": resources.get("CPU", 1), "num_gpus": resources.get("GPU", 0)}
    import ray

    try:
        ray.init(**given, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # Ray raises many kinds
        sys.exit(
            f"cannot connect to Ray's cluster ({options.address or 'started here'}): {type(error).__name__}: {error}"
        )


def _serve(group: Any, options: argparse.Namespace, secret: str) -> int:
    import ray
    from ray.exceptions import RayError
    from ray.util.placement_group import placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    present = {node["NodeID"]: node for node in ray.nodes()}
    places = placement_group_table(group)["bundles_to_node_id"]
    running: dict[Any, str] = {}
    actors = []  # an actor ends when nothing refers to it
    for number in range(options.nodes):
        name = name_of(present[places[number]])
        asked = {"num_cpus": options.resources.get("CPU", 0), "num_gpus": options.resources.get("GPU", 0)}
        bundle = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        actor = ray.remote(NodeServer).options(**asked, scheduling_strategy=bundle).remote()
        server = [*options.server, "--as-node", str(number)]
        environment = {**options.environment, "PLUMBLINE_NODE_NAME": name}
        called = actor.run.remote(server, os.getcwd(), environment, secret)
        actors.append(actor)
        running[called] = name
    while running:
        (ended,), _ = ray.wait(list(running))
        name = running.pop(ended)
        try:
            matter = ray.get(ended)
        except RayError as error:
            matter = f"Ray has lost its actor: {error}"
        if matter:
            print(f"{name}: {matter}", file=sys.__stderr__, flush=True)
            if running:
                ray.wait(list(running), num_returns=len(running), timeout=END_TIMEOUT_S)
            return 1
    return 0


def too_small(nodes: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> str | None:
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    most = options.groups  # more than these need not be counted
    fits = [int(min(most, *(have.get(name, 0) // need for name, need in options.resources.items()))) for have in alive]
    able = sum(map(bool, fits))
    if able < options.nodes:
        return f"{_wanted(options)} were requested, but only {able} nodes can provide that: {_present(nodes)}"
    if (room := room_for(fits, options.nodes)) < options.groups:
        return (
            f"{options.groups} times {_wanted(options)} were requested, once for each subject and each process of "
            f"pytest -n, but the cluster has room for {room}: use a smaller -n. {_present(nodes)}"
        )
    return None


def room_for(fits: Sequence[int], nodes: int) -> int:
    """Return how many groups of ``nodes`` different nodes are possible; ``fits`` has each node's number of places."""
    # N groups are possible if the nodes can fill N * ``nodes`` places, at most one place per group each.
    return max(groups for groups in range(sum(fits) + 1) if sum(min(fit, groups) for fit in fits) >= groups * nodes)


def name_of(node: Mapping[str, Any]) -> str:
    given = node["NodeName"]
    return str(node["NodeManagerHostname"] if given == node["NodeManagerAddress"] else given)


def _wanted(options: argparse.Namespace) -> str:
    return f"{options.nodes} nodes with {_shown(options.resources)} each"


def _present(nodes: Sequence[Mapping[str, Any]]) -> str:
    alive = [f"{name_of(node)} has {_shown(node['Resources'])}" for node in nodes if node["Alive"]]
    more = f" and {len(alive) - _MOST_NODES} more" if len(alive) > _MOST_NODES else ""
    return f"there are {len(alive)} nodes: {', '.join(alive[:_MOST_NODES])}{more}"


def _shown(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if name in resources) or "no CPU"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    cluster = parser.add_mutually_exclusive_group(required=True)
    cluster.add_argument("--address", help="the cluster's head, HOST:PORT")
    cluster.add_argument("--temp-dir", help="start a cluster here, with its files in this folder")
    parser.add_argument("--nodes", type=int, required=True, help="the number of nodes")
    parser.add_argument("--resources", type=json.loads, required=True, help="the resources of each node, as JSON")
    parser.add_argument("--groups", type=int, default=0, help="refuse a cluster without room for this many groups")
    parser.add_argument("--timeout", type=float, required=True, help="seconds for Ray to place the servers")
    parser.add_argument("--environment", type=json.loads, default={}, help="variables of the servers, as JSON")
    parser.add_argument("server", nargs=argparse.REMAINDER, help="the command of a node's server")
    return parser.parse_args()


if __name__ == "__main__":
    main()
