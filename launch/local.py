r"""Runs a script as several processes on this machine, as a cluster would.

    python launch/local.py --processes 2 -- experiments/train.py --config=... --workdir=runs/two

Each process gets the devices that the machine has (on a CPU one simulated device, or
`--devices_each`). Output of all but the first is shown too, with the process in front. When one
fails, the others are ended, and its exit code is the launcher's. Ctrl-C and SIGTERM are passed on.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time


def build_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--devices_each", type=int, default=1, help="simulated, on a CPU")
    parser.add_argument("command", nargs="+", metavar="SCRIPT ...", help="after --")
    return parser


def start(index: int, args: argparse.Namespace, port: int) -> subprocess.Popen:
    """Starts one process; its output is copied line by line."""
    joined = [
        "--distributed", f"--coordinator=localhost:{port}",
        f"--num_processes={args.processes}", f"--process_id={index}",
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, *args.command, *joined],
        env=os.environ | {"JAX_NUM_CPU_DEVICES": str(args.devices_each)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a Ctrl-C reaches the launcher only, which passes it on
    )

    def copy() -> None:
        for line in process.stdout:
            print(f"[{index}] {line}", end="", flush=True)

    process.copier = threading.Thread(target=copy, daemon=True)
    process.copier.start()
    return process


def main() -> int:
    """Starts all, waits for all, ends all when one fails."""
    args = build_parser().parse_args()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = [start(index, args, port) for index in range(args.processes)]

    def pass_on(number: int, frame: object) -> None:
        del number, frame
        processes[0].send_signal(signal.SIGTERM)  # one is enough: they stop together

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    code = 0
    while any(process.poll() is None for process in processes):
        failed = [process.returncode for process in processes if process.poll()]
        if failed and not code:
            code = failed[0] if failed[0] > 0 else 128 - failed[0]
            time.sleep(2)  # the others say what they saw
            for process in processes:
                process.kill()
        time.sleep(0.1)
    for process in processes:
        process.copier.join()
    return code or max(process.returncode for process in processes)


if __name__ == "__main__":
    sys.exit(main())
