"""Links that lose packets are named once, until they have recovered."""

from paceline.health.stragglers import WINDOW_S, LinkJudge


def judged(judge, counts, start_s=0.0):
    """What is said of (sent, sent again) in each two seconds, in order."""
    found, sent, resent = [], 0, 0
    for number, (more, again) in enumerate(counts):
        sent, resent = sent + more, resent + again
        one = judge.add(1, start_s + 2.0 * number, sent, resent)
        if one is not None:
            found.append((number, one))
    return found


def test_a_lossy_link_is_named_once_and_again_when_it_is_sound():
    counts = [(1000, 0)] * 3 + [(1000, 20)] * 10 + [(1000, 0)] * 10
    (named_at, named), (sound_at, sound) = judged(LinkJudge(), counts)
    assert 3 < named_at <= 3 + WINDOW_S / 2
    assert not named.is_sound
    assert named.rank == 1
    assert "rank 1 on b had to send" in named.text("b")
    assert sound_at > 13
    assert sound.is_sound
    assert sound.share <= 0.001
    assert "sound again" in sound.text("b")


def test_few_segments_and_little_loss_are_no_news():
    assert judged(LinkJudge(), [(10, 1)] * 20) == []
    assert judged(LinkJudge(), [(10_000, 30)] * 20) == []


def test_a_restarted_process_counts_from_zero():
    judge = LinkJudge()
    judged(judge, [(1000, 0)] * 10)
    assert judge.add(1, 100.0, 5, 0) is None
    assert judge.add(1, 111.0, 1005, 50).share == 0.05
