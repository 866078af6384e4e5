"""Maps Paxml's flags to their replacements, for the parser's hints and the table in docs/coming_from_pax.md (Markdown).

These are the flags of paxml/main.py 1.4.0 and of the modules that it imports, including JAX, Fiddle and absl.
"""

_TUNING = 'There is no tuning service: `--sweep all` or `--sweep_index N` run the choices of `pg.oneof`.'
_TF_DATA_SERVICE = 'There is no tf.data service: an input reads in the process that trains.'
_STDERR = 'Messages are on stderr: leave it out.'
_FIDDLE = 'Write `--exp NAME`, and `--set PATH=VALUE` for its fields.'

# FLAG or FLAG=CHOICE -> the replacement.
FLAGS: dict[str, str] = {
  'mode=infer': 'There are no inference runners: write `--mode decode_once`, which decodes `decode_datasets()`.',
  **dict.fromkeys(('mode=tf_data_service_dispatcher', 'mode=tf_data_service_worker'), _TF_DATA_SERVICE),
  'eval_during_decode': 'Start `--mode eval --watch` beside the decode job.',
  'restore_checkpoint_step': 'Write `--checkpoint_step N`, once for each step.',
  'restore_checkpoint_dir': 'Write `--set init_from=DIR`, with a `--job_log_dir` of its own.',
  'decode_output_pickle': 'Both files are always written: leave it out.',
  'enable_summary_writer': 'Write `--set trackers=`; `metrics.jsonl` is always written.',
  'pax_only_aggregate_summaries': 'Write `--set trackers=`; `metrics.jsonl` has only numbers.',
  'enable_checkpoint_saving': 'Write `--set checkpoint_every=None`; the last step is always saved.',
  'jax_fully_async_checkpoint': 'Training always continues while a checkpoint is written: leave it out.',
  'async_timeout_secs': 'Write `--set first_step_timeout_s=S`, which bounds the saving of a checkpoint, too.',
  'exit_after_ondemand_checkpoint': 'A job always exits after it has saved on SIGTERM: leave it out.',
  'checkpoint_todelete_subdir': 'Old checkpoints are deleted; `--set checkpoint_max_to_keep=N` keeps more of them.',
  'maybe_use_persistence_checkpointing': 'Checkpoints have one format: leave it out.',
  'tensorstore_use_ocdbt': "Paxml's checkpoints are read with OCDBT and without: leave it out.",
  'pmap_use_tensorstore': 'Checkpoints have one format: leave it out.',
  'enforce_restore_shape_check': 'The shapes of a checkpoint are always checked: leave it out.',
  'server_addr': 'Write `--coordinator_address HOST:PORT`.',
  'num_hosts': 'Write `--num_processes N`.',
  'host_idx': 'Write `--process_id I`.',
  'multiprocess_gpu': 'Processes of Slurm, Kubernetes and Open MPI are found by themselves: leave it out.',
  'globally_use_hardware_rng': "Random numbers come from JAX's generator rbg, Paxml's default: leave it out.",
  'enable_auto_sharding': 'Weights are sharded as their split dims say: leave it out.',
  'jax_profiler_port': 'Write `--set profile_steps=A,B`, or a number of steps to `JOB_LOG_DIR/profile_now`.',
  'jax_traceback_filtering_option': 'JAX reads the environment variable `JAX_TRACEBACK_FILTERING`.',
  'jax_backend_target': 'JAX reads the environment variable `JAX_BACKEND_TARGET`.',
  'jax_xla_backend': 'JAX reads the environment variable `JAX_PLATFORMS`, such as cpu.',
  'jax_enable_checks': 'JAX reads the environment variable `JAX_ENABLE_CHECKS`.',
  'tfds_data_dir': 'TensorFlow Datasets reads the environment variable `TFDS_DATA_DIR`.',
  'fdl': _FIDDLE,
  'fdl_config': _FIDDLE,
  'fdl_set': 'Write `--set PATH=VALUE`.',
  'fdl_config_file': 'Write `--config FILE`, with the `config.json` of a job.',
  'fiddler': 'Change the config in `task()` of a subclass of the experiment, and name that class by `--exp`.',
  'fdl_tags_set': 'Fields are set by their paths alone, `--set PATH=VALUE`.',
  'fdl_help': 'Write `--print_config`, which lists the fields and their values.',
  **dict.fromkeys(('study', 'controller_mode', 'tuner_group', 'metrics_from', 'num_trials', 'pythia_port'), _TUNING),
  **{
    f'tf_data_service_{name}': _TF_DATA_SERVICE
    for name in (
      *('address', 'port', 'dispatcher_address', 'worker_address', 'worker_addresses', 'data_transfer_protocol'),
      *('data_transfer_address', 'work_dir', 'fault_tolerant_mode'),
    )
  },
  **dict.fromkeys(('alsologtostderr', 'logtostderr', 'stderrthreshold', 'verbosity'), _STDERR),
}
