"""How ``bucket_collectives`` chooses buckets, and writes one collective for each."""

from lightning_autoparallel.passes.bucketing.choose import BucketLimit, choose_buckets
from lightning_autoparallel.passes.bucketing.write import BucketWriter

__all__ = ["BucketLimit", "BucketWriter", "choose_buckets"]
