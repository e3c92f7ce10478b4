from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.runtime.executor.placement import Bundle, Component, Place, assign, plan

ENGINE = Component(name="engine", workers=2, gpus=1, here=True)
TRAINER = Component(name="trainer", workers=3, gpus=1)


def test_disjoint_components_get_a_bundle_per_worker():
    planned = plan([ENGINE, TRAINER])
    assert planned.bundles == (Bundle(1, 1, True),) * 2 + (Bundle(1, 1, False),) * 3


def test_colocated_components_share_bundles():
    planned = plan([ENGINE, TRAINER], colocate=True)
    assert planned.bundles == (Bundle(2, 1, True), Bundle(2, 1, True), Bundle(1, 1, False))
    seats = assign(planned, [Place(index, "n", "a", str(index)) for index in range(3)])
    assert [seat.place.index for seat in seats["engine"]] == [0, 1]
    assert [seat.gpus for seat in seats["trainer"]] == [0.5, 0.5, 1.0]


def test_a_remote_trainer_has_no_devices():
    planned = plan([ENGINE, Component(name="trainer", workers=1)])
    assert planned.bundles[-1] == Bundle(1, 0, False)
    assert assign(planned, [Place(index, "n", "a") for index in range(3)])["trainer"][0].gpus == 0


def test_ranks_follow_nodes_and_devices_in_their_natural_order():
    planned = plan([Component(name="engine", workers=4, gpus=1)])
    places = [
        Place(0, "y", "10.0.0.10", "0"),
        Place(1, "x", "10.0.0.9", "10"),
        Place(2, "x", "10.0.0.9", "9"),
        Place(3, "y", "10.0.0.10", "1"),
    ]
    assert [seat.place.index for seat in assign(planned, places)["engine"]] == [2, 1, 0, 3]


@pytest.mark.parametrize(
    ("components", "colocate", "message"),
    [
        ([ENGINE, ENGINE], False, "different names, got engine, engine"),
        ([Component(name="engine", workers=-1)], False, "workers, cpus and gpus of engine must be >= 0"),
        ([Component(name="engine", workers=1, gpus=1.5)], False, "gpus of a worker of engine must be a whole number"),
        ([Component(name="engine", workers=1, gpus=2)], True, "engine must be <= 1 where devices are shared, got 2"),
    ],
)
def test_what_cannot_be_placed_is_refused(components, colocate, message):
    with pytest.raises(ValueError, match=message):
        plan(components, colocate=colocate)


COMPONENTS = st.lists(
    st.builds(
        Component,
        name=st.uuids().map(str),
        workers=st.integers(0, 5),
        cpus=st.sampled_from([0.0, 0.5, 1.0]),
        gpus=st.sampled_from([0.0, 0.5, 1.0]),
        here=st.booleans(),
    ),
    max_size=4,
)


@given(COMPONENTS, st.booleans(), st.randoms())
def test_every_worker_has_a_seat_and_no_bundle_is_overfull(components, colocate, random):
    planned = plan(components, colocate=colocate)
    where = [(random.choice("xy"), random.choice("0123")) for _ in planned.bundles]
    places = [Place(index, node, node, device) for index, (node, device) in enumerate(where)]
    random.shuffle(places)
    seats = assign(planned, places)
    taken = [seat for component in components for seat in seats[component.name]]
    assert [len(seats[component.name]) for component in components] == [c.workers for c in components]
    for index, bundle in enumerate(planned.bundles):
        inside = [seat for seat in taken if seat.place.index == index]
        assert inside and (colocate or len(inside) == 1)
        assert sum(seat.cpus for seat in inside) == bundle.cpus
        assert sum(seat.gpus for seat in inside) <= bundle.gpus
    for component in components:
        for seat in seats[component.name]:
            assert planned.bundles[seat.place.index].here or not component.here
