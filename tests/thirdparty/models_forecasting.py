"""Models of pytorch-forecasting: LightningModules with steps, losses and optimizers of their own."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Any

from tests.thirdparty.built import STEPS, Builder, Built, without_dropout

ROWS = 4


def dataset(covariates: bool = True, target_normalizer: Any = None) -> Any:
    """A few series with a category, a known and an unknown variable; lengths are alike."""
    import numpy
    import pandas
    from pytorch_forecasting import TimeSeriesDataSet

    random = numpy.random.default_rng(0)
    time = numpy.tile(numpy.arange(24), 4)
    frame = pandas.DataFrame({"time": time, "series": numpy.repeat(["a", "b", "c", "d"], 24)})
    frame["value"] = numpy.sin(time / 3.0) + 2.0 + 0.1 * random.standard_normal(len(time))
    frame["known"] = numpy.cos(time / 5.0)
    more = {"static_categoricals": ["series"], "time_varying_known_reals": ["known"]} if covariates else {}
    return TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="value",
        group_ids=["series"],
        min_encoder_length=8,
        max_encoder_length=8,
        min_prediction_length=4,
        max_prediction_length=4,
        time_varying_unknown_reals=["value"],
        **({} if target_normalizer is None else {"target_normalizer": target_normalizer}),
        **more,
    )


def forecaster(kind: str, covariates: bool = True, loss: str | None = None, **options: Any) -> Built:
    """A model made from the data set, on batches of its own loader."""
    import pytorch_forecasting
    from pytorch_forecasting import metrics

    data = dataset(covariates)
    chosen = {} if loss is None else {"loss": getattr(metrics, loss)()}
    common = {"learning_rate": 1e-3, "log_interval": -1, "optimizer": "adamw", "optimizer_params": {"eps": 1e-5}}
    model = getattr(pytorch_forecasting, kind).from_dataset(data, **{**common, **chosen, **options})
    loader = data.to_dataloader(train=True, batch_size=ROWS, shuffle=False, num_workers=0)
    return Built(module=without_dropout(model), batches=list(islice(loader, STEPS)))


SMALL = {"hidden_size": 8, "dropout": 0.0}

MODELS: dict[str, Builder] = {
    "temporal_fusion": partial(
        forecaster, "TemporalFusionTransformer", attention_head_size=2, hidden_continuous_size=4, **SMALL
    ),
    "nhits": partial(forecaster, "NHiTS", **SMALL),
    "nbeats": partial(forecaster, "NBeats", False, widths=[8, 8], num_blocks=[1, 1], num_block_layers=[1, 1]),
    "deepar": partial(forecaster, "DeepAR", rnn_layers=1, **SMALL),
    "recurrent": partial(forecaster, "RecurrentNetwork", rnn_layers=1, **SMALL),
    "mlp": partial(forecaster, "DecoderMLP", n_hidden_layers=1, **SMALL),
    "tide": partial(forecaster, "TiDEModel", num_encoder_layers=1, num_decoder_layers=1, **SMALL),
}
