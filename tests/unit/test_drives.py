"""The bookkeeping of drives: it survives a kill in the middle of a write."""

from furlong.resources.drives import Drive


def drive_once(root, step):
    drive = Drive(root)
    with drive.step(step):
        pass
    drive.save(root)


def test_a_line_cut_off_by_a_kill_costs_that_drive_alone(tmp_path):
    drive_once(tmp_path, 1)
    path = tmp_path / "drives.jsonl"
    path.write_text(path.read_text() + '{"pid": 12, "sec')
    drive_once(tmp_path, 2)
    assert [step["step"] for drive in Drive.saved(tmp_path) for step in drive["steps"]] == [1, 2]


def test_a_run_without_drives_has_none(tmp_path):
    assert Drive.saved(tmp_path) == []
