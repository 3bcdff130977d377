"""Links that lose packets are reported once, and again when they have recovered."""

from paceline.health.stragglers import WINDOW_S, LinkMonitor


def find_reports(monitor, counts, start_s=0.0):
    """Return (interval, report) pairs for the (sent, resent) counts of intervals of two seconds."""
    links, total_sent, total_resent = [], 0, 0
    for interval, (sent, resent) in enumerate(counts):
        total_sent, total_resent = total_sent + sent, total_resent + resent
        link = monitor.add(1, start_s + 2.0 * interval, total_sent, total_resent)
        if link is not None:
            links.append((interval, link))
    return links


def test_lossy_link_is_reported_once_and_again_after_recovery():
    counts = [(1000, 0)] * 3 + [(1000, 20)] * 10 + [(1000, 0)] * 10
    (lossy_at, lossy), (recovered_at, recovered) = find_reports(LinkMonitor(), counts)
    assert 3 < lossy_at <= 3 + WINDOW_S / 2
    assert not lossy.has_recovered
    assert lossy.rank == 1
    assert "rank 1 on b retransmitted" in lossy.text("b")
    assert recovered_at > 13
    assert recovered.has_recovered
    assert recovered.share <= 0.001
    assert "has recovered" in recovered.text("b")


def test_few_segments_or_little_loss_are_not_reported():
    assert find_reports(LinkMonitor(), [(10, 1)] * 20) == []
    assert find_reports(LinkMonitor(), [(10_000, 30)] * 20) == []


def test_counters_may_restart_from_zero():
    monitor = LinkMonitor()
    find_reports(monitor, [(1000, 0)] * 10)
    assert monitor.add(1, 100.0, 5, 0) is None
    assert monitor.add(1, 111.0, 1005, 50).share == 0.05
