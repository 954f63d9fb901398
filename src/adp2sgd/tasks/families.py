"""Tasks on files: a source of data and the models that suit it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from adp2sgd import models
from adp2sgd.data import cifar10, heart, idx, images, kaldi, table
from adp2sgd.data.augment import crop_and_flip
from adp2sgd.data.folder import Source
from adp2sgd.data.records import Records
from adp2sgd.errors import ConfigError, did_you_mean
from adp2sgd.losses import cross_entropy
from adp2sgd.task import Task
from adp2sgd.tasks.options import builder, check_model, converted


@dataclass(frozen=True, kw_only=True)
class Family:
    """A source of real data and the models that suit it, the first by default."""

    load: Callable[..., Source]
    models: tuple[str, ...]
    given: Mapping[str, Any] = field(default_factory=dict)  # the source's options where the user sets none
    augment: bool = False  # crop and mirror the training images where the user does not say


FROM_DATA = ("inputs", "channels", "size")  # of a model's options
TABLE_MODELS = ("logistic", "mlp")
IMAGE_MODELS = ("cnn", *(name for name in models.MODELS if name not in ("cnn", "lstm")))
FAMILIES = {
    "cifar10": Family(load=cifar10.load, models=IMAGE_MODELS, augment=True),
    "fashion": Family(load=partial(idx.load, "fashion"), models=IMAGE_MODELS),
    "mnist": Family(load=partial(idx.load, "mnist"), models=IMAGE_MODELS),
    "speech": Family(load=kaldi.load, models=("lstm",), given={"classes": 320}),
    "heart": Family(load=heart.load, models=TABLE_MODELS),
    "table": Family(load=table.load, models=TABLE_MODELS),
    "images": Family(load=images.load, models=IMAGE_MODELS),
}


def from_files(
    name: str,
    /,
    *,
    model: str | None = None,
    only: str | None = None,
    limit: int | None = None,
    augment: bool | None = None,
    **options: Any,
) -> Task:
    """A family of `FAMILIES`. Options that the source's `load` takes go there, all others to the model's constructor.

    `only` trains on one site's records, but holds out all sites'; `limit` keeps at most so many training and as many
    held-out records, evenly spread over the files; `augment` crops and mirrors training images.
    """
    family = FAMILIES[name]
    model = model or family.models[0]
    check_model(name, model, family.models)
    loads, builds = (inspect.signature(made).parameters for made in (family.load, models.MODELS[model]))
    known = [*(key for key in builds if key not in FROM_DATA), *loads, "only", "limit", "augment"]
    for key in options:
        if key not in known:
            told = f'options.{key} is unknown to task "{name}/{model}"{did_you_mean(key, known)}'
            raise ConfigError(f"{told}; it takes: {', '.join(known)}")
    source = _load(name, family, {key: options.pop(key) for key in loads.keys() & options.keys()})
    if augment and source.train.inputs.dim() != 4:
        raise ConfigError(f'options.augment = true is for images, and task = "{name}" has none; remove it')
    return Task(
        model=builder(name, model, {model: _shape(model, source)}, options),
        train=_spread(source.train if only is None else _one_site(source.train, only), limit),
        test=_spread(source.test, limit),
        loss=source.loss or cross_entropy,
        metrics=source.metrics,
        prepare=source.prepare,
        augment=crop_and_flip if (family.augment if augment is None else augment) else None,
        fitted=source.fitted,
        encoder=source.encoder,
        identifier=source.identifier,
    )


def _load(name: str, family: Family, options: Mapping[str, Any]) -> Source:
    arguments = {**family.given, **options}
    for key, parameter in inspect.signature(family.load).parameters.items():
        if parameter.default is parameter.empty and key not in arguments:
            raise ConfigError(f'task = "{name}" needs options.{key}; set {key} under [options]')
    return family.load(**converted(family.load, arguments))


def _shape(model: str, source: Source) -> dict[str, int]:
    """Those of the model's arguments that the data fixes."""
    shape = source.train.inputs.shape[1:]  # [features], [frames, features] or [channels, height, width]
    fixed = {"classes": source.classes, "inputs": shape[-1] if len(shape) == 2 else shape.numel()}
    if len(shape) == 3:
        fixed |= {"channels": shape[0], "size": shape[1]}
    known = inspect.signature(models.MODELS[model]).parameters
    if len(shape) == 3 and "size" in known and shape[1] != shape[2]:
        fix = f"set options.size = [{shape[1]}, {shape[1]}]"
        raise ConfigError(f"{model} reads square images, not {shape[1]} × {shape[2]}; {fix}")
    return {key: value for key, value in fixed.items() if key in known}


def _one_site(records: Records, site: str) -> Records:
    if records.sites is None or site not in records.site_names:
        known = ", ".join(records.site_names) or "this data has none"
        raise ConfigError(f'options.only = "{site}" is not a site of the data; sites: {known}')
    return records.take(torch.nonzero(records.sites == records.site_names.index(site)).flatten())


def _spread(records: Records, limit: int | None) -> Records:
    if limit is None or limit >= len(records):
        return records
    if limit < 1:
        raise ConfigError(f"options.limit = {limit} leaves no record; use at least 1")
    return records.take(torch.arange(limit) * len(records) // limit)
