// The type of a dashboard file: Grafana's own types, as JSON.

import type { Dashboard, Panel, RowPanel, TableFieldOptions } from "@grafana/schema";
import type { Options as BarGauge } from "@grafana/schema/dist/esm/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen";
import type { Options as Stat } from "@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen";
import type { Options as Table } from "@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen";
import type { Options as Text } from "@grafana/schema/dist/esm/raw/composable/text/panelcfg/x/TextPanelCfg_types.gen";
import type {
  FieldConfig as TimeSeriesFieldConfig,
  Options as TimeSeries,
} from "@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen";

// Enums are written as their values, and properties with defaults are optional.
type Json<T> = T extends string
  ? `${T}`
  : T extends number | boolean | null | undefined
    ? T
    : T extends (infer Item)[]
      ? Json<Item>[]
      : T extends object
        ? { [Key in keyof T]: Json<T[Key]> }
        : T;

type Partly<T> = T extends (infer Item)[]
  ? Partly<Item>[]
  : T extends object
    ? { [Key in keyof T]?: Partly<T[Key]> }
    : T;

// Unknown properties are errors, except where Grafana accepts any.
type Of<Type extends string, Options, Custom = Record<string, never>> = Omit<
  Json<Panel>,
  "type" | "options" | "fieldConfig" | "title" | "description"
> & {
  type: Type;
  title: string;
  description: string;
  options: Partly<Json<Options>>;
  fieldConfig: Omit<Json<NonNullable<Panel["fieldConfig"]>>, "defaults"> & {
    defaults: Omit<Json<NonNullable<Panel["fieldConfig"]>["defaults"]>, "custom" | "unit"> & {
      unit: string;
      custom?: Partly<Json<Custom>>;
    };
  };
};

// A text panel has no data and no field configuration.
type TextPanel = Omit<Json<Panel>, "type" | "options" | "title" | "description"> & {
  type: "text";
  title: string;
  description: string;
  options: Partly<Json<Text>>;
};

export type KnownPanel =
  | Json<RowPanel>
  | TextPanel
  | Of<"bargauge", BarGauge>
  | Of<"stat", Stat>
  | Of<"table", Table, TableFieldOptions>
  | Of<"timeseries", TimeSeries, TimeSeriesFieldConfig>;

// Grafana's type contains only the common part; the Prometheus data source adds this.
type Annotation = Json<NonNullable<NonNullable<Dashboard["annotations"]>["list"]>[number]> & {
  expr: string;
  step: string;
  titleFormat: string;
};

export type Checked = Omit<Json<Dashboard>, "panels" | "annotations"> & {
  uid: string;
  title: string;
  panels: KnownPanel[];
  annotations: { list: Annotation[] };
};
