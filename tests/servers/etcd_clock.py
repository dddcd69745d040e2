"""
The clocks of one running process, set wrong: its wall clock and its monotonic one, by a leap or by their rate.

A program in Go asks the kernel for the time by a page of code that the kernel puts into every process
(the vDSO), and so hears of no library that is loaded before its own. So the code on that page is
replaced, in this one process, by code that makes the system call and adds what it was told to. The
kernel lets a process write into its own children; nothing else is needed.

    clock_gettime(clock, time):
        make the system call; return its error, if any
        t = nanoseconds of it
        if clock is a wall clock:    t += WALL
        else if it counts no CPU:    t += (t - SINCE) * RATE / 2**20 + LEAP
        return t
"""

from __future__ import annotations

import os
import platform
import signal
import struct
import time
from pathlib import Path

from patience import wait_until

CODE = bytes.fromhex(
    "b8e4000000 0f05 85c0 7554"  # mov eax, 228; syscall; test eax, eax; jne ERROR
    "4c8d054e000000"  # lea r8, WALL
    "48690600ca9a3b 48034608"  # imul rax, [rsi], 1000000000; add rax, [rsi + 8]
    "85ff 7428 83ff05 7423"  # CLOCK_REALTIME, CLOCK_REALTIME_COARSE: to SHIFT
    "83ff02 7432 83ff03 742d"  # those that count CPU: to DONE
    "4889c2 492b5008 490faf5010 48c1fa14 4801d0 49034018 eb03"  # t += (t - SINCE) * RATE >> 20; t += LEAP
    "490300"  # SHIFT: add rax, WALL
    "4899 b900ca9a3b 48f7f9 488906 48895608"  # cqo; idiv by 1000000000; seconds and nanoseconds to [rsi]
    "31c0 c3"  # DONE: xor eax, eax; ERROR: ret
)
"""For x86-64. WALL, SINCE, RATE and LEAP, of 64 bits each, stand behind it."""
_SECOND = 1_000_000_000
_SYMBOL = b"__vdso_clock_gettime"


class ClockError(Exception):
    """The clocks of this process cannot be set here."""


class ForeignClock:
    """
    The clocks of the running process *pid*, a child of this one, or any other that root may control.

    Raises:
        ClockError: another kind of machine, or a kernel that does not allow it.
    """

    def __init__(self, pid: int) -> None:
        if platform.machine() != "x86_64" or platform.system() != "Linux":
            raise ClockError(f"the code is for Linux on x86-64, and this is {platform.system()} {platform.machine()}")
        self.pid = pid
        try:
            self._memory = os.open(f"/proc/{pid}/mem", os.O_RDWR)
        except OSError as error:
            raise ClockError(f"the memory of a child is not ours to write: {error}") from error
        try:
            self._begin, self._end = self._page()
            image = os.pread(self._memory, self._end - self._begin, self._begin)
            self._code = self._begin + _address_of(image, _SYMBOL, room=len(CODE) + 32)
            self._write(CODE, 0, 0, 0, 0)
        except OSError as error:
            os.close(self._memory)
            raise ClockError(f"its code cannot be replaced: {error}") from error

    def set(self, *, wall: float = 0.0, leap: float = 0.0, rate: float = 1.0) -> None:
        """
        From now on its clocks differ from those of the machine.

        Args:
            wall: Seconds by which its wall clock is ahead.

            leap: Seconds by which its monotonic clock leaps forward; a program may rely on it never going back.

            rate: Seconds that its monotonic clock counts in each second.
        """
        excess = round((rate - 1.0) * 2**20)
        self._write(b"", int(wall * _SECOND), time.monotonic_ns(), excess, int(leap * _SECOND))

    def close(self) -> None:
        """Leave the process as it is."""
        os.close(self._memory)

    def _page(self) -> tuple[int, int]:
        for line in Path(f"/proc/{self.pid}/maps").read_text().splitlines():
            if line.endswith("[vdso]"):
                begin, _, end = line.split()[0].partition("-")
                return int(begin, 16), int(end, 16)
        raise ClockError("the process has no vDSO")

    def _write(self, code: bytes, *numbers: int) -> None:
        """Write while it stands still, and is nowhere in what is replaced."""
        data = code + struct.pack("<4q", *numbers)
        place = self._code + (0 if code else len(CODE))
        for _ in range(100):
            os.kill(self.pid, signal.SIGSTOP)
            try:
                wait_until(lambda: all(state == "T" for state, _ in self._threads()), what="it stands still")
                if not any(self._begin <= at < self._end for _, at in self._threads()):
                    os.pwrite(self._memory, data, place)
                    return
            finally:
                os.kill(self.pid, signal.SIGCONT)
            time.sleep(0.001)
        raise ClockError("the process does nothing but ask for the time")

    def _threads(self) -> list[tuple[str, int]]:
        """Of each thread, its state and where in its program it is."""
        found = []
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            where = (task / "syscall").read_text().split()
            found.append((state, 0 if where == ["running"] else int(where[-1], 16)))
        return found


def _address_of(image: bytes, symbol: bytes, *, room: int) -> int:
    """Where in an ELF image a function begins that is at least so long."""
    table, strings, size = 0, 0, 0
    (sections,) = struct.unpack_from("<Q", image, 0x28)
    each, count = struct.unpack_from("<HH", image, 0x3A)
    for number in range(count):
        at = sections + number * each
        (kind,) = struct.unpack_from("<I", image, at + 4)
        if kind == 11:  # SHT_DYNSYM
            table, size = struct.unpack_from("<QQ", image, at + 0x18)
            (link,) = struct.unpack_from("<I", image, at + 0x28)
            (strings,) = struct.unpack_from("<Q", image, sections + link * each + 0x18)
    for at in range(table, table + size, 24):
        name, _, _, _, value, length = struct.unpack_from("<IBBHQQ", image, at)
        end = image.index(b"\0", strings + name)
        if image[strings + name : end] == symbol and length >= room:
            return int(value)
    raise ClockError("the vDSO of this kernel has no room for the code")
