"""The same word count on Ray Data, which also splits, shuffles and reduces over processes.

Run: python examples/learn/05_word_count_ray.py
"""

import ray

LINES = ["the ring and the tree", "a ring of ranks", "the ranks of a tree", "a tree"]

ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False
terms = ray.data.from_items(LINES).flat_map(
    lambda row: [{"term": term} for term in row["item"].split()]
)
for row in terms.groupby("term").count().sort("term").take_all():
    print(row["term"], row["count()"])
