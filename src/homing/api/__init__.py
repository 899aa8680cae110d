"""The library behind the verbs. This package does the work; the command line only parses arguments and prints.

It never prompts, prints or exits, and loads torch only inside the functions that need it. Its messages and warnings go
to `homing.api.notices`. The names that users import are in `homing` itself. `FUNCTIONS` names the function of each
verb; the verb's module in `homing.cli.verbs` parses the arguments, calls that function and prints the result.
"""

# verb -> module:function, in the order of `homing --help`. Strings, so that importing this package loads nothing.
FUNCTIONS: dict[str, str] = {
    "quickstart": "homing.api.tools.run_quickstart:run_quickstart",
    "new": "homing.api.data.new_run:new_run",
    "explain": "homing.api.tools.explain_key:explain_key",
    "prep": "homing.api.data.prepare:prep_run",
    "data check": "homing.api.data.inspect_chats:check_chats",
    "data show": "homing.api.data.inspect_chats:show_chat",
    "verify": "homing.api.verify_before_launch:verify_run",
    "train": "homing.api.train_here:train_here",
    "generate": "homing.api.models.generate_text:generate",
    "chat": "homing.api.models.chat_session:open_chat",
    "serve": "homing.api.models.serve_model:serve_model",
    "export": "homing.api.models.export_model:export_model",
    "publish": "homing.api.models.publish_model:publish_model",
    "eval": "homing.api.models.eval_model:eval_model",
    "plan": "homing.api.runs.plan_run:plan_run",
    "offers": "homing.api.runs.find_offers:find_offers",
    "launch": "homing.api.runs.launch_run:launch",
    "status": "homing.api.lookup.status:run_status",
    "watch": "homing.api.runs.watch_run:watch_run",
    "logs": "homing.api.runs.read_logs:read_logs",
    "ssh": "homing.api.runs.connect:open_shell",
    "forward": "homing.api.runs.connect:forward_port",
    "limit": "homing.api.runs.limit_run:limit_run",
    "stop": "homing.api.runs.stop_run:stop_run",
    "fetch": "homing.api.runs.fetch_model:fetch_model",
    "destroy": "homing.api.runs.end_runs:destroy",
    "guard": "homing.api.runs.guard_runs:guard_runs",
    "runs": "homing.api.lookup.list_runs:list_runs",
    "ledger": "homing.api.lookup.read_ledger:read_ledger",
    "reconcile": "homing.api.runs.reconcile_all:reconcile_all",
    "adopt": "homing.api.runs.adopt_run:adopt_run",
    "rehearse": "homing.api.tools.rehearse_run:rehearse_run",
    "store ls": "homing.api.tools.store_files:list_files",
    "store get": "homing.api.tools.store_files:get_file",
    "store put": "homing.api.tools.store_files:put_file",
    "store rm": "homing.api.tools.store_files:remove_files",
    "dashboard": "homing.api.pages.dashboard_server:open_dashboard",
    "tensorboard": "homing.api.tools.write_curves:write_curves",
    "report": "homing.api.pages.write_report:report_run",
    "image build": "homing.api.tools.build_image:build_image",
    "setup": "homing.api.tools.setup_provider:setup_provider",
    "doctor": "homing.api.tools.run_doctor:run_doctor",
}
