"""The tables of PostgreSQL's first version; they mean what SQLite's of the same names mean."""

from alembic import op

revision = "0001"
down_revision = None

TABLES = """
CREATE TABLE records (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    record_id text COLLATE "C" NOT NULL UNIQUE,
    scenario text COLLATE "C" NOT NULL,
    kind text COLLATE "C" NOT NULL,
    created_at double precision NOT NULL,
    digest bytea NOT NULL,
    payload bytea NOT NULL
);
ALTER TABLE records ALTER COLUMN payload SET STORAGE EXTERNAL;
CREATE INDEX records_page ON records (scenario, kind, seq, created_at);
CREATE TABLE pending (
    scenario text COLLATE "C" NOT NULL, seq bigint NOT NULL, PRIMARY KEY (scenario, seq)
);
CREATE TABLE consumption (
    seq bigint PRIMARY KEY,
    scenario text COLLATE "C" NOT NULL,
    step bigint NOT NULL,
    position bigint NOT NULL,
    disposition text COLLATE "C" NOT NULL,
    reason text NOT NULL,
    purged smallint NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX consumption_step ON consumption (scenario, step, position);
CREATE INDEX consumption_unpurged ON consumption (seq) WHERE purged = 0;
CREATE TABLE counts (
    scenario text COLLATE "C" NOT NULL, name text COLLATE "C" NOT NULL, n bigint NOT NULL,
    PRIMARY KEY (scenario, name)
) WITH (fillfactor = 50);
CREATE TABLE scenarios (
    scenario text COLLATE "C" PRIMARY KEY,
    created_at double precision NOT NULL,
    head text COLLATE "C" NOT NULL,
    step bigint NOT NULL,
    algorithm_state text NOT NULL
);
CREATE TABLE releases (
    scenario text COLLATE "C" NOT NULL,
    number bigint NOT NULL,
    release_id text COLLATE "C" NOT NULL,
    body text NOT NULL,
    PRIMARY KEY (scenario, number),
    UNIQUE (scenario, release_id)
);
CREATE TABLE commits (
    scenario text COLLATE "C" NOT NULL,
    step bigint NOT NULL,
    commit_id text COLLATE "C" NOT NULL UNIQUE,
    job_id text COLLATE "C" UNIQUE,
    digest bytea NOT NULL,
    body text NOT NULL,
    PRIMARY KEY (scenario, step)
);
CREATE TABLE sequences (name text COLLATE "C" PRIMARY KEY, n bigint NOT NULL);
INSERT INTO sequences VALUES ('load', 0);
CREATE TABLE probe (filler bytea NOT NULL);
ALTER TABLE probe ALTER COLUMN filler SET STORAGE EXTERNAL;
INSERT INTO probe VALUES ('');
CREATE TABLE lease (holder text NOT NULL, epoch bigint NOT NULL, expires double precision NOT NULL);
INSERT INTO lease VALUES ('', 0, 0);
CREATE TABLE write_order ();
"""


def upgrade() -> None:
    for statement in TABLES.strip().rstrip(";").split(";\n"):
        op.execute(statement)
