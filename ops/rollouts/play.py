"""Plays the tasks of one group: their replies are drawn together, turn by turn, until every conversation is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from furlong.ops.envs.protocol import Env, Episode, Message, Observation
from furlong.ops.envs.single_turn import SingleTurn
from furlong.ops.protocols import GenerateRequest, Sample
from furlong.ops.records import Failure
from furlong.ops.rollouts.bounded import bounded
from furlong.ops.rollouts.trajectory import Draw, EngineLost, Failed, Outcome, Task
from furlong.ops.sessions.drift import DriftError
from furlong.ops.sessions.messages import MessageError
from furlong.ops.sessions.session import Session, SessionError, Turn, turn_seed
from furlong.ops.sessions.template import ChatTemplate, TemplateError
from furlong.ops.spec import SamplingSpec

Act = Callable[[Sequence[Callable[[], Any]]], list[Any]]
"""Makes calls into the environment at once: their results and errors."""


@dataclass
class _Seat:
    """A task under way."""

    task: Task
    session: Session
    turn: Turn
    """The one to draw next, or drawn last."""
    episode: Episode | None = None
    reply: Message | None = None
    """The last one."""
    seconds: float = 0.0
    """Spent in the environment."""
    outcome: Outcome | None = None
    """Set once, when it is over."""


def play(
    tasks: Sequence[Task],
    prompt: dict[str, Any],
    env: Env,
    template: ChatTemplate,
    draw: Draw,
    sampling: SamplingSpec,
    deadline: float,
    context_length: int,
    key: str,
) -> list[Outcome]:
    """One outcome per task, in order; a task that fails leaves the others alone, and every episode is closed.

    Args:
        tasks: tries at trajectories of one group.
        prompt: the row of table `prompts` that the group is about.
        env: what it is played in.
        template: of the model.
        draw: draws the replies of all tasks that are at the same turn; it may raise EngineLost. While the environment is
            at work it is asked for none now and then, and what it raises then ends everything.
        sampling: `max_new_tokens` bounds each reply.
        deadline: seconds that one reply, and one step of the environment, may take.
        context_length: longest conversation, in tokens; one that grows beyond it ends with reason `length`.
        key: names the group to `draw`.
    Raises:
        ValueError: a prompt that leaves no room for a reply, or messages that the template cannot write.
    """

    def act(calls: Sequence[Callable[[], Any]]) -> list[Any]:
        return _all(calls, env, deadline, lambda: draw([], key))

    first = _open(prompt, env, template, act, context_length)
    if isinstance(first, Exception):
        return [Failed(t.trajectory_id, t.sample, t.attempt, _kind(first), _told(first), 0) for t in tasks]
    seats = [_Seat(task, Session(template), first) for task in tasks]
    try:
        _begin(seats, prompt, env, act)
        while live := [seat for seat in seats if seat.outcome is None]:
            _draw(live, draw, sampling, deadline, context_length, key)
            _answer([seat for seat in live if seat.outcome is None], env, act, deadline, context_length)
    finally:
        _close([seat for seat in seats if seat.episode is not None], act)
    return [seat.outcome for seat in seats]


def _open(prompt: dict[str, Any], env: Env, template: ChatTemplate, act: Act, context_length: int) -> Turn | Exception:
    """The first turn, rendered once for all tasks, or what the environment raised instead of beginning."""
    (messages,) = act([lambda: env.begin(prompt)])
    if isinstance(messages, Exception):
        return messages
    turn = Session(template).plan(messages, env.tools or None)
    if len(turn.prompt) >= context_length:
        raise ValueError(
            f"prompt {prompt['prompt_id']} has {len(turn.prompt)} tokens, which leaves no room for a reply in the model's "
            f"context of {context_length}; shorten data.system, the tools' schemas or the questions"
        )
    return turn


def _begin(seats: list[_Seat], prompt: dict[str, Any], env: Env, act: Act) -> None:
    calls = [lambda seed=seat.task.seed: env.episode(prompt, seed) for seat in seats]
    for seat, episode in zip(seats, act(calls), strict=True):
        if isinstance(episode, Exception):
            _fail(seat, _kind(episode), _told(episode))
        else:
            seat.episode = episode


def _draw(
    live: list[_Seat], draw: Draw, sampling: SamplingSpec, deadline: float, context_length: int, key: str
) -> None:
    """Draw one reply for each seat and commit it; seats that cannot go on get their outcome."""
    requests = [_request(seat, sampling, deadline, context_length) for seat in live]
    try:
        samples = draw(requests, key)
    except EngineLost as err:
        for seat in live:
            _fail(seat, Failure.ENGINE_LOST, str(err))
        return
    for seat, request, sample in zip(live, requests, samples, strict=True):
        if sample.request_id != request.request_id:
            raise ValueError(f"{sample.request_id} was drawn for {request.request_id}; mend the router's order")
        _commit(seat, sample)


def _request(seat: _Seat, sampling: SamplingSpec, deadline: float, context_length: int) -> GenerateRequest:
    task, turn = seat.task, seat.turn
    return GenerateRequest(
        request_id=f"{task.trajectory_id}:{task.attempt}.{turn.number}",
        prompt=turn.prompt,
        seed=turn_seed(task.seed, turn.number),
        max_new_tokens=min(sampling.max_new_tokens, context_length - len(turn.prompt)),
        temperature=sampling.temperature,
        deadline=deadline,
    )


def _commit(seat: _Seat, sample: Sample) -> None:
    if sample.finish_reason == "deadline":
        seat_tokens = f"{len(sample.tokens)} tokens of reply {seat.turn.number} were drawn until its deadline"
        return _fail(seat, Failure.DEADLINE, seat_tokens, len(sample.tokens))
    if sample.finish_reason == "abort":
        return _fail(seat, Failure.ENGINE_LOST, "the reply was aborted and not resumed", len(sample.tokens))
    try:
        seat.reply = seat.session.commit(seat.turn, sample)
    except SessionError as err:
        return _fail(seat, Failure.ENGINE_LOST, str(err), len(sample.tokens))
    if sample.finish_reason != "stop":
        _end(seat, sample.finish_reason)
    return None


def _answer(live: list[_Seat], env: Env, act: Act, deadline: float, context_length: int) -> None:
    """Let the environment answer the last replies; seats get the next turn or their outcome."""
    begin = time.monotonic()
    calls = [lambda seat=seat: seat.episode.step(seat.reply, deadline) for seat in live]
    observations = act(calls)
    spent = time.monotonic() - begin
    for seat, found in zip(live, observations, strict=True):
        seat.seconds += spent
        if isinstance(found, Exception):
            _fail(seat, _kind(found), _told(found))
        elif found.done:
            _end(seat, "length" if found.truncated else "stop")
        else:
            _go_on(seat, found, env, context_length)


def _go_on(seat: _Seat, found: Observation, env: Env, context_length: int) -> None:
    said = seat.session.conversation(len(seat.session.nodes) - 1)
    try:
        seat.turn = seat.session.plan([*said, *found.messages], env.tools or None)
    except TemplateError as err:
        return _fail(seat, Failure.DRIFT, str(err))
    except (MessageError, SessionError) as err:
        return _fail(seat, Failure.ENVIRONMENT, f"its answer cannot follow the conversation: {err}")
    if len(seat.turn.prompt) >= context_length:
        _end(seat, "length")
    return None


def _end(seat: _Seat, reason: str) -> None:
    """Make the trajectory out of the session; where more was said than one question, compare it with its messages."""
    try:
        if seat.turn.tools or seat.turn.number:
            seat.session.check()
        found = seat.session.trajectories(seat.task.trajectory_id, seat.task.sample, seat.task.seed)
    except (DriftError, TemplateError) as err:
        return _fail(seat, Failure.DRIFT, str(err))
    last = seat.session.nodes[-1].sample.finish_reason
    seat.outcome = [
        replace(one, finish_reason=reason if last == "stop" else last, seconds=one.seconds + seat.seconds)
        for one in found
    ]
    return None


def _fail(seat: _Seat, kind: Failure, detail: str, tokens: int = 0) -> None:
    """Give up on the try; `tokens` were sampled beside those in the session."""
    task = seat.task
    lost = seat.session.sampled + tokens
    seat.outcome = Failed(task.trajectory_id, task.sample, task.attempt, kind, _line(detail), lost)


def _kind(error: Exception) -> Failure:
    return Failure.DEADLINE if isinstance(error, TimeoutError) else Failure.ENVIRONMENT


def _told(error: Exception) -> str:
    return _line(f"{type(error).__name__}: {error}")


def _line(text: str) -> str:
    return " ".join(text.split())[:500]


def _close(seats: list[_Seat], act: Act) -> None:
    """Close all episodes; a task whose episode holds on to something has failed, lest it pile up unseen."""
    results = act([seat.episode.close for seat in seats])
    for seat, found in zip(seats, results, strict=True):
        if isinstance(found, Exception):
            _fail(seat, _kind(found), f"the episode could not be closed: {_told(found)}")


def _all(calls: Sequence[Callable[[], Any]], env: Env, seconds: float, look: Callable[[], object]) -> list[Any]:
    """Results and errors of calls into the environment."""
    if isinstance(env, SingleTurn):
        return [
            call() for call in calls
        ]  # nothing in it can wait or fail, and threads would cost more than all the rest
    return bounded(calls, seconds, look)
