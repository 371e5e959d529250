r"""Runs a script as several processes on this machine, as a cluster would.

    python launch/local.py --processes 2 -- experiments/train.py --config=... --workdir=runs/two

Each process gets the devices that the machine has (on a CPU one simulated device, or
`--devices_each`). Each line of output has the number of its process in front. When one fails, the
others are ended, and its exit code is the launcher's. Ctrl-C and SIGTERM are passed on.
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


def start(
    index: int, args: argparse.Namespace, port: int
) -> tuple[subprocess.Popen, threading.Thread]:
    """Starts one process and a thread that copies its output line by line."""
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

    copier = threading.Thread(target=copy, daemon=True)
    copier.start()
    return process, copier


def main() -> int:
    """Starts all, waits for all, ends all when one fails."""
    args = build_parser().parse_args()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    started = [start(index, args, port) for index in range(args.processes)]
    processes = [process for process, _ in started]

    def pass_on(number: int, frame: object) -> None:
        del number, frame
        processes[0].send_signal(signal.SIGTERM)  # one is enough: they stop together

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)

    def failures() -> list[int]:
        return [process.returncode for process in processes if process.poll()]

    while not (failed := failures()) and any(process.poll() is None for process in processes):
        time.sleep(0.1)
    if failed:
        time.sleep(2)  # the others say what they saw
    for process, copier in started:
        process.kill()  # nothing happens to one that has ended
        copier.join()
        process.wait()
    failed = failed or failures()  # or the last one failed as the others were through
    return next((code if code > 0 else 128 - code for code in failed), 0)


if __name__ == "__main__":
    sys.exit(main())
