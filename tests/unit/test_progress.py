"""Progress says little, at the right time, and ends cleanly."""

import io

import pytest

from sfumato.tracking.progress import Progress, format_duration, format_value


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Flushes(io.StringIO):
    """Keeps what had been flushed, as a log file would hold it after a kill."""

    flushed = ""

    def flush(self):
        self.flushed = self.getvalue()


def run_plain(steps, seconds, total=1000, **fields):
    clock, stream = Clock(), Flushes()
    with Progress(total, label="pretrain", stream=stream, clock=clock, **fields) as progress:
        for step in steps:
            clock.now += seconds
            progress.update(step, loss=0.43211, lr=1e-3)
    return stream


def test_plain_line_has_label_step_values_and_eta():
    lines = run_plain([1], 2.0, total=97).flushed.splitlines()
    assert lines == ["pretrain  step 1/97  loss 0.4321  lr 1.0e-03  eta 3m12s"]


def test_plain_lines_come_at_most_every_interval_and_at_both_ends():
    lines = run_plain(range(1, 101), 1.0, total=100, interval_s=30).flushed.splitlines()
    assert [line.split()[2] for line in lines] == ["1/100", "31/100", "61/100", "91/100", "100/100"]
    assert "eta" not in lines[-1]


def test_a_run_that_stops_early_shows_its_last_step_once():
    lines = run_plain(range(1, 8), 1.0, interval_s=60).flushed.splitlines()
    assert [line.split()[2] for line in lines] == ["1/1000", "7/1000"]


def test_the_last_line_of_a_run_that_stops_early_is_that_of_its_last_step():
    clock, stream = Clock(), Flushes()
    with Progress(10, stream=stream, clock=clock, interval_s=60) as progress:
        for step, loss in ((1, 0.5), (2, 0.25), (3, 0.125)):
            clock.now += 2.0
            progress.update(step, loss=loss)
        clock.now += 30.0
    assert stream.flushed.splitlines() == [
        "train  step 1/10  loss 0.5000  eta 18s",
        "train  step 3/10  loss 0.1250  eta 14s",
    ]


def test_a_resumed_run_counts_time_from_its_own_start():
    lines = run_plain([501], 3.0, start_step=500).flushed.splitlines()
    assert lines[0].endswith("eta 24m57s"), "499 steps of 3 s, not 3 s / 501"


def test_one_slow_step_hardly_moves_the_eta():
    clock = Clock()
    progress = Progress(100, stream=io.StringIO(), clock=clock)
    assert progress.eta_s is None
    for step in range(1, 11):
        clock.now += 60.0 if step == 5 else 1.0
        progress.update(step)
    assert progress.eta_s == pytest.approx(90.0)


def test_eta_follows_the_recent_rate():
    clock = Clock()
    progress = Progress(200, stream=io.StringIO(), clock=clock)
    for step in range(1, 101):
        clock.now += 1.0 if step <= 50 else 2.0
        progress.update(step)
    assert progress.eta_s == pytest.approx(200.0)


def test_messages_are_shown_at_once_and_other_ranks_are_silent():
    stream = Flushes()
    with Progress(10, stream=stream) as progress:
        progress.message("saved [bold]step 5[/bold]")
        assert stream.flushed == "saved [bold]step 5[/bold]\n"
    silent = Terminal()
    with Progress(10, stream=silent, enabled=False) as progress:
        progress.update(1, loss=1.0)
        progress.message("hello")
    assert silent.getvalue() == ""


def test_terminal_shows_a_bar_with_count_values_and_messages_as_they_are():
    clock, terminal = Clock(), Terminal()
    with Progress(40, label="rl [a]", stream=terminal, clock=clock) as progress:
        for step in (1, 2, 40):
            clock.now += 1.0
            progress.update(step, loss=0.5)
            if step == 2:
                assert "2/40" in terminal.getvalue() and "eta 38s" in terminal.getvalue()
        progress.message("saved [bold]x[/bold]")
    text = terminal.getvalue()
    assert "40/40" in text and "loss 0.5000" in text and "rl [a]" in text
    assert "saved [bold]x[/bold]" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor comes back"


def test_an_exception_passes_through_and_the_terminal_is_given_back():
    terminal = Terminal()
    progress = Progress(5, stream=terminal)
    with pytest.raises(ZeroDivisionError), progress:
        progress.update(1 // 0)
    assert "\x1b[?25h" in terminal.getvalue()
    progress.close()
    progress.update(2)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.43211, "0.4321"),
        (1e-3, "1.0e-03"),
        (0, "0"),
        (-0.5, "-0.5000"),
        (65536, "65536"),
        (812.251, "812.25"),
        (12345.6, "12346"),
        (2.5e7, "2.5e+07"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_format_value(value, text):
    assert format_value(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (192, "3m12s"), (18420, "5h07m"), (187200, "2d04h")]
)
def test_format_duration(seconds, text):
    assert format_duration(seconds) == text
