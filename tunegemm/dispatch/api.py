"""The process's dispatcher, its policy, and how to read its records again."""

from __future__ import annotations

from tunegemm.choose.policies import Policy, Preference
from tunegemm.dispatch.dispatcher import Dispatcher
from tunegemm.dispatch.states import Block, begin, end, end_with_outer

#: Computes all products of the process.
dispatcher = Dispatcher()
#: Its method, which each call would bind anew.
product = dispatcher.product
#: Its planner's, for patched layers.
quick = dispatcher.planner.quick


def serve_by(other: Dispatcher) -> Dispatcher:
    """Let another dispatcher compute all products from now on; returns the previous one."""
    global dispatcher, product, quick
    before, dispatcher, product, quick = dispatcher, other, other.product, other.planner.quick
    return before


def refresh() -> None:
    """Forget all records: the next call reads the database again.

    Use it when another process found a better record for a product that already has one. Products that fall
    back to torch look for new records every few seconds.
    """
    dispatcher.planner.refresh()


class policy:
    """Serve by this policy: ``tunegemm.policy("deterministic")`` from now on, or within a ``with`` block.

    A block's policy holds for its context: the thread or asyncio task that runs it, and the backward
    passes that it begins. Other contexts keep theirs. Blocks may end in any order. A plain call sets the
    process's policy, for all contexts without their own. `prefer`: ``fastest``, ``deterministic`` (no
    result depends on scheduling), ``batch_invariant`` (a row's bits do not depend on the number of rows),
    ``no_workspace`` (no memory beyond operands and output) or ``min_energy`` (least measured energy).
    `max_sms`: how many multiprocessors a launch may fill, which leaves the others to communication. If a
    policy excludes the record, the next best measured candidate serves, else torch. Raises PolicyError
    for an unknown policy.
    """

    _blocks: list[Block] = []  # noqa: RUF012 - of one whose policy is unknown
    _is_block = False

    def __init__(self, prefer: Preference = "fastest", *, max_sms: int | None = None) -> None:
        self._policy = Policy(prefer, max_sms)
        dispatcher.planner.policy  # noqa: B018 - reads the environment's policy first
        self._blocks = [begin(self._policy)]

    def __repr__(self) -> str:
        return f"<tunegemm.policy: {self._policy}>"

    def __enter__(self) -> None:
        if not self._is_block:  # perhaps in another context
            end(self._blocks.pop())
        self._is_block = True
        self._blocks.append(begin(self._policy))

    def __exit__(self, *_: object) -> None:
        end(self._blocks.pop())

    def __del__(self) -> None:
        """Set the process's policy unless a ``with`` block was entered. `__init__` cannot know: a block's
        policy must not serve other threads even for a moment."""
        if self._blocks and not self._is_block:
            dispatcher.planner.use(self._policy)
            end_with_outer(self._blocks[0])
